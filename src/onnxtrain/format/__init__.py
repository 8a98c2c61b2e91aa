"""The contract between the halves, and with JavaScript and C: names, files, element types."""
