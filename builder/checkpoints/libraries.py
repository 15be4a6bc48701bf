"""Silence transformers, torch and the Hub, for commands."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence transformers, torch and the Hub within the block, or in a function that it decorates.

    Errors still surface as exceptions. For commands: it silences the whole process, until it is left.
    """
    verbosity, disabled = transformers_logging.get_verbosity(), logging.root.manager.disable
    shown, shown_of_hub = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bars()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
            transformers_logging.set_verbosity(verbosity)
            if shown:
                transformers_logging.enable_progress_bar()
            if shown_of_hub:
                enable_progress_bars()
