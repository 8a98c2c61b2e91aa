"""From a file to one canonical model that gradient rules can be written against."""
