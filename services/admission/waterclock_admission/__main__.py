"""Admission as a process."""

from waterclock_admission.service import main

if __name__ == "__main__":
    main()
