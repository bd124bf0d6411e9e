"""Result files, tables, plots and HTML pages."""
