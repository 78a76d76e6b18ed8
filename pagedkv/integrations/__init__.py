"""The engine under other people's systems; each file needs the library that it is named after."""
