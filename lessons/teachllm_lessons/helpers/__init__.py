"""Provide what each notebook needs: its pictures, its exercises, and the symptoms of its planted faults."""
