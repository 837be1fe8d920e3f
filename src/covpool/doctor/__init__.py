"""Whether covpool works on this machine: what is installed, and a self-test of half a minute at most."""

from covpool.doctor.checks import Finding
from covpool.doctor.examination import Examination, examine

__all__ = ["Examination", "Finding", "examine"]
