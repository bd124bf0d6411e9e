-- From version 9 to 10: sessions whose pages are written before they are committed.

CREATE TABLE creations (
    session TEXT PRIMARY KEY,
    since REAL NOT NULL
) STRICT;
