"""The demonstration: many chats out of one small page pool."""
