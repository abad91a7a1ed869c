"""Translation over HTTP, with the REST interface of LibreTranslate."""
