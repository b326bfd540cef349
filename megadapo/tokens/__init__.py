"""Texts and chats as tokens, and the tokens at which responses end."""
