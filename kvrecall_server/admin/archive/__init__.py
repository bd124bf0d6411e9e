"""The session archive (.kvs): one session as one file, with its catalog records and its pages."""
