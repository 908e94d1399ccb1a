"""Worker: runs requests on an engine and says when each one really started."""
