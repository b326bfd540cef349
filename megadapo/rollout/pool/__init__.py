"""The driver's view of the engines: start, dispatch, loss and restart."""
