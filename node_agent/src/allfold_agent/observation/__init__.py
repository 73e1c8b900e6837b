"""What this agent sees of its groups over time, and the incidents that it finds."""
