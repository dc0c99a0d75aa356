"""Tables, figures and the report's page."""
