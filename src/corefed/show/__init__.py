"""Results for people: tables, pictures, the report page, the live view, trackers.

May import use and the rooms below it.
"""
