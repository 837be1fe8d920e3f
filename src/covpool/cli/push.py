"""``covpool push``: see :func:`covpool.models.push.push_to_hub`."""

from dataclasses import dataclass
from pathlib import Path

EXAMPLE = "covpool push runs/birds/bundle ann/birds --license apache-2.0 --results runs/birds/evaluation"


@dataclass(frozen=True)
class Arguments:
    """Upload a bundle to the Hugging Face Hub, with a model card.

    Log in first with hf auth login, or set HF_TOKEN. Other commands accept the result as
    hf-hub:user/name in place of a bundle.

    Attributes:
        bundle: folder of a trained model.
        repository: user/name or user/name@branch on the Hub; created if it does not exist.
        license: license of the weights as the Hub names it, such as apache-2.0 or cc-by-nc-4.0.
        dataset: training data on the Hub, as user/name.
        results: folder of covpool eval for this bundle; its metrics and intervals go into the model card.
        private: a private repository.
    """

    bundle: str
    repository: str
    license: str | None = None
    dataset: str | None = None
    results: Path | None = None
    private: bool = False


@dataclass(frozen=True)
class Pushed:
    """The address with its commit."""

    address: str


def run(arguments: Arguments) -> Pushed:
    """Upload the bundle."""
    from covpool.models.push import push_to_hub

    address = push_to_hub(
        arguments.bundle,
        arguments.repository,
        license=arguments.license,
        dataset=arguments.dataset,
        results=arguments.results,
        private=arguments.private,
    )
    return Pushed(address)


def text(result: Pushed) -> str:
    """Return the address, and how to use it."""
    latest = result.address.partition("@")[0]
    return f"pushed: {result.address}\nnext: covpool predict {latest} photos"
