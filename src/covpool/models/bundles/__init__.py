"""Models on disk, for exchange: two files in a folder, and a loader that trusts nothing in them."""

from covpool.models.bundles.bundle import load_model, read_card, save_model
from covpool.models.bundles.card import Card
from covpool.models.bundles.strict_json import BundleError

__all__ = ["BundleError", "Card", "load_model", "read_card", "save_model"]
