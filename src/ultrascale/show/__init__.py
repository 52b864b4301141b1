"""What the terminal shows: tables and sentences, one file per verb. Nothing is computed here."""
