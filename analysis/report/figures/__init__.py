"""The report's pictures, each from values of `analysis.findings`; whatever has no data gives no picture.

Colour and marker are the algorithm. Arms of one algorithm in one picture differ by their dashes. Measured and virtual
seconds never share a picture: every value comes with its group, and a group has one clock.
"""
