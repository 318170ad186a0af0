"""The error of data that cannot be had."""

from __future__ import annotations


class DataUnavailableError(Exception):
    """Data are neither here nor to be fetched; the message says what is missing and how to get it."""

    answers_user = True  # shown as it is, without a traceback


class DataSettingsError(ValueError):
    """Settings that the data at hand cannot meet, such as a block longer than the corpus."""

    answers_user = True
