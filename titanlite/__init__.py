"""A PyTorch-native pretraining reference for Llama models."""
