"""Make one plain file of a checkpoint whose experts are spread over several.

    python -m orchestra.consolidate outputs/openmoe/<time>/checkpoints/best.ckpt openmoe.ckpt

The file is Lightning's format: `load_from_checkpoint`, `checkpoint=<file>` and the generation command read it, with
`weights_only=True`. `--weights` leaves out everything but the model's `state_dict` and its hyper-parameters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestra.checkpoint_files import AtomicCheckpointIO, is_whole, read

_FOR_TRAINING = ("optimizer_states", "lr_schedulers", "loops", "callbacks", "orchestra")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m orchestra.consolidate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="directory (or file) of a checkpoint")
    parser.add_argument("file", type=Path, help="file to write; must not exist")
    parser.add_argument("--weights", action="store_true", help="leave out what only training needs")
    arguments = parser.parse_args()
    if arguments.file.exists():
        parser.error(f"{arguments.file} exists")
    if not is_whole(arguments.checkpoint):
        parser.error(f"{arguments.checkpoint} is not a readable checkpoint")
    content = read(arguments.checkpoint)
    if arguments.weights:
        content = {key: value for key, value in content.items() if key not in _FOR_TRAINING}
    AtomicCheckpointIO().save_checkpoint(content, arguments.file)
    print(f"{arguments.file}: {len(content['state_dict'])} tensors, step {content['global_step']}")


if __name__ == "__main__":
    main()
