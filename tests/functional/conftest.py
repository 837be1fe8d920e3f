"""Setup for the tests of the mathematics."""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():
    # The first forward-mode derivative of a process makes torch import a module of its own that uses
    # the deprecated torch.jit.script. Not our warning, and it must not fail whichever test comes first.
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
