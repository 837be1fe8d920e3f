"""Check whether covpool works on this machine: installed packages, and a self-test of at most 30 seconds."""

from covpool.doctor.checks import Finding
from covpool.doctor.examination import Examination, examine

__all__ = ["Examination", "Finding", "examine"]
