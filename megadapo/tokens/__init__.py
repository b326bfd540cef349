"""How texts and chats become tokens, and the tokens at which responses end."""
