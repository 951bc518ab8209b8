"""Support the notebooks of `lessons/`: a watched engine, its pictures, exercises and planted faults.

watch.py      an engine that is stepped, and what it did       views.py     the visualizer's views, standing still
source.py     the engine's source, live                        picture.py   what is drawn, for light and for dark
predict.py    a number that the reader commits to              guard.py     running what has just been written
exercise.py   a piece, its contract, an engine with it         breaking.py  a planted fault to find
index.py      what there is, and where the engine has it        links.py     what a notebook links to
lesson_NN.py  each lesson's exercises and scenarios            faults.py    the faults, and the tests that notice
"""
