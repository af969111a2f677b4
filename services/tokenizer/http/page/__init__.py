"""The page that shows a cell in a browser, and a chat with it: one HTML, one CSS, one module of JavaScript."""
