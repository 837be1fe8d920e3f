"""Train the same network with average and covariance pooling on generated images: ``covpool demo``."""
