"""The waterclock command: starts the mesh, sends requests, audits and reports."""
