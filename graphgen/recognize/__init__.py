"""How graphs are read back: which operators their nodes form.

Importing this package gives the operators their recognizers and the graph its canonical form.
"""

import graphgen.recognize.attention
import graphgen.recognize.canonical
import graphgen.recognize.choices
import graphgen.recognize.contractions
import graphgen.recognize.groups
import graphgen.recognize.layouts
import graphgen.recognize.loops
import graphgen.recognize.recurrent
import graphgen.recognize.renormalized
import graphgen.recognize.rotary
import graphgen.recognize.saved
import graphgen.recognize.scattered
import graphgen.recognize.sums
