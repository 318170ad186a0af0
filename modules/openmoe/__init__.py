"""OpenMoE: a decoder-only Mixture-of-Experts language model and what its router learns.

Xue, Zheng, Fu, Ni, Zheng, Zhou, You. *OpenMoE: An Early Effort on Open Mixture-of-Experts Language
Models*, ICML 2024. Importing this package is cheap: nothing heavy loads until a submodule is asked for.
"""
