"""Groups and answers on disk that no checkpoint holds yet."""
