"""Speed, memory and cost of measured runs on other devices."""
