"""The model behind the engine: weights in, logits and tokens out."""
