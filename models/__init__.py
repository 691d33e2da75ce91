"""The embedded pair: the checkpoints used when no model is named. Facts and licences stand in each MODEL_CARD.md."""
