"""Text to token ids and back, whole or as a stream, and chats to prompts."""
