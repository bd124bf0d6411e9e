-- From version 7 to 8: the catalog has an id, by which workers know whose sessions their pages are.

CREATE TABLE catalog_id (
    id TEXT NOT NULL
) STRICT;
INSERT INTO catalog_id (id) VALUES (lower(hex(randomblob(16))));
