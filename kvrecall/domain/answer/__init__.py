"""What an answer may be: its constraint, grammars of its texts, defaults of its sampling."""
