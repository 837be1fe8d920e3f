"""What training a model will cost, measured before anything is allocated."""
