"""What a trained network is worth, and its use on images: one folder or file a protocol."""
