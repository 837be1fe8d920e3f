"""The paper's ImageNet experiments scaled to a part of Tiny-ImageNet and to minutes on a CPU."""
