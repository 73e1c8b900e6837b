"""Control links: one WebSocket per agent, on which it hears of terms and says who is lost."""
