"""Setup for the tests of the mathematics."""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():
    # The first forward-mode derivative in a process makes torch import one of its own modules, which uses the
    # deprecated torch.jit.script. Without this, the warning would fail whichever test runs first.
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
