"""What an encoding does, by itself or inside a trained model."""
