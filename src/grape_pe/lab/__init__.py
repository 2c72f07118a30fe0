"""Training, evaluating and comparing models."""
