"""Whether covpool works on this machine: what is installed, and a self-test of half a minute at most."""

from covpool.doctor.examination import Examination, examine
from covpool.doctor.finding import Finding

__all__ = ["Examination", "Finding", "examine"]
