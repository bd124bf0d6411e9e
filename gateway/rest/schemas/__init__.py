"""Bodies of the REST API's requests, and conversion to the public values of its responses, by subject."""
