"""What goes over the wire, as msgspec structs: the names and defaults of the OpenAI API. Null means absent."""
