"""What else follows a run: Weights & Biases, TensorBoard, trackio, or a user's own."""
