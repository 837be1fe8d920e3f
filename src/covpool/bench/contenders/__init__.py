"""Everything that is timed: ``isqrt_cov`` in its variants, and what it is measured against."""

from covpool.bench.contenders.bare_engine import BARE
from covpool.bench.contenders.contender import MEASURES, Contender, Measure, Prepared
from covpool.bench.contenders.decompositions import EIGH, SVD
from covpool.bench.contenders.ours import BFLOAT16, COMPILED, OURS, RECOMPUTE
from covpool.bench.contenders.plain import PLAIN

CONTENDERS = {
    contender.name: contender for contender in (OURS, COMPILED, RECOMPUTE, BFLOAT16, PLAIN, EIGH, SVD, BARE)
}

__all__ = ["CONTENDERS", "MEASURES", "OURS", "Contender", "Measure", "Prepared"]
