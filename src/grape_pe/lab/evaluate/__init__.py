"""Evaluating a model: losses at any length, lm_eval's benchmarks, samples of text."""
