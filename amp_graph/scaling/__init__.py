"""The loss scale: as a state machine, inside the graphs of a model, and as an explicit scaler."""
